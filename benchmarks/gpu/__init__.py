"""The stages of benchmarks/on_gpu.py, one module each (`measure`), and their shared functions."""
