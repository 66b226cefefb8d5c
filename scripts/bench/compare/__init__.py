"""Stock and overlaid vLLM, views of one installation, measured by turns."""
