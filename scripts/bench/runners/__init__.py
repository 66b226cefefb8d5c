"""Stock's and our model runners in one process, step by step by turns."""
