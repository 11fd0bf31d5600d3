"""The libraries and file formats people have; third-party imports happen inside functions."""
