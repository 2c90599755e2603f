"""Commands that give what a run holds to other programs and people."""
