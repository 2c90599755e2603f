"""The Python API: what `import tula_cli as tula` offers."""
