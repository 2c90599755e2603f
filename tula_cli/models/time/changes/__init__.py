"""Whether the pace of a training has changed, since when, and in what."""
