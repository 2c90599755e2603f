"""What a probe looks at beside whole steps."""
