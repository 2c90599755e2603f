"""`tula diff`: what is different between two runs, and which of it an answer to "it was faster last month" may be."""
