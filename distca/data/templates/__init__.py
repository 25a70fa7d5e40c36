"""Chat templates: how they run, where in what they write the assistant speaks, and its ids."""
