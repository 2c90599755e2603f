"""Models of GPU memory and host memory."""
