"""What is compiled at installation, where there is a compiler; nothing here is imported as a module."""
