"""The measurements: one function per stage, named in `gpu.plan`."""
