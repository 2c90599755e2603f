"""The JSON Schema of job.yaml and site.yaml, and the words of their keys."""
