"""The libraries and file formats people have, one file each; third-party imports happen inside functions."""
