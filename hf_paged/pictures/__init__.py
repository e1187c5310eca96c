"""Pictures and pages of what an engine has and does. Nothing of ours is imported here."""
