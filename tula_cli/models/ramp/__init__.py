"""A batch that grows over the first epochs (`train.ramp`): its stages, and what they take."""
