"""Code that users write: loading it, calling it, watching it, and running it in a process of its own."""
