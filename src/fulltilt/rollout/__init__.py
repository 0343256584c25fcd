"""Generation: the engine interface, the native engine, and collecting groups in prompt order."""
