"""The stages of benchmarks/on_gpu.py, a module each (`measure`), and what they share."""
