"""What the campaigns on asynchronous runs share."""
