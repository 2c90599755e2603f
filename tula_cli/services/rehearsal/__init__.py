"""How a script resumes, tried out before it trains for hours."""
