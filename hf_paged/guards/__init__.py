"""What has to stay as it was for the native path to stand in for a model's own code."""
