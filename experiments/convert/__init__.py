"""From package files to what the recipes read; needs no network."""
