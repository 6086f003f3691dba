"""Captured graphs kept on disk, so that a model is imported and traced once for all clusters it is planned for."""
