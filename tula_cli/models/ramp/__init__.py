"""A batch size that grows over the first epochs (`train.ramp`): its stages, their nodes and their cost."""
