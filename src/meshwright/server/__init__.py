"""An HTTP server with OpenAI's API. One process handles HTTP and text; further processes run the engine."""
