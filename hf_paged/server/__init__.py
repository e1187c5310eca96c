"""A server of the OpenAI API over an engine."""
