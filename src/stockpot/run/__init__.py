"""One directory per run: what it is, what it found, and how it goes on."""
