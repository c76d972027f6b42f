"""Measure what parts of megarl cost, some beside other libraries; each module is a command."""
