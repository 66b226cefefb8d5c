"""Slices, the one type of result, and the files and tables made of them."""
