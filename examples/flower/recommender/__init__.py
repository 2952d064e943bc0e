"""Ten users train a recommender with Flower; what the server sees is recorded."""
