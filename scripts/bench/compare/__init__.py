"""Stock and overlaid vLLM, made from one installation and measured by turns."""
