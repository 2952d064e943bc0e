"""Who trains where and sends what."""
