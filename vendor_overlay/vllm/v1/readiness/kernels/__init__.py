"""Triton kernels. Import them only where Triton has a driver, or under its interpreter."""
