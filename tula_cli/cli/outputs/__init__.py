"""Commands that put what is known into another form."""
