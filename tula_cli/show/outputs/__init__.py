"""What is shown of commands that give what a run holds to others."""
