"""The public functions, one file each, and the code that they share.

`import manyhands as mh` exports them under the same names: `mh.fit` is `api.fit.fit`. Only this package and the command
line import packages that must not import each other.
"""
