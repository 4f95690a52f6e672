"""An HTTP server with OpenAI's interface: one process for HTTP and text, one for the engine."""
