"""What is measured: one function a stage, named in `gpu.plan`."""
