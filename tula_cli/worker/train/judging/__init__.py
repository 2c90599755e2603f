"""What an evaluation is judged by: metrics of the user's own, which epoch is the best, and when enough is reached."""
