"""Callbacks of training libraries that collect ingredients while a model is trained, and make a soup of them."""
