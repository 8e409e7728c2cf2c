"""The public functions, a file each, and what they share; only this package and the command line join the others.

The names are those of `import manyhands as mh`: `mh.fit` is `api.fit.fit`.
"""
