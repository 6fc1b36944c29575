"""The write of key and value rows to pages."""
