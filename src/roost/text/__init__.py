"""Text: tokens to text and back, stop strings, chat templates."""
