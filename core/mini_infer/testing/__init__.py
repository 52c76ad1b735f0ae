"""What a third party needs to prove a plugin right. Nothing heavy is imported when this is."""
