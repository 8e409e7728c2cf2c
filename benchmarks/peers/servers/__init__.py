"""The servers that ours is measured against, each as its documentation says, one file each."""
