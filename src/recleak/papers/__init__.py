"""Papers as data: what they published, cell by cell, what they claim, and how to measure it again."""
