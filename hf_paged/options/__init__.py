"""From a GenerationConfig to what a request asks for."""
