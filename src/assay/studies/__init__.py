"""Controlled studies: experiments that explain methods. One command each: a grid of cells, findings with a verdict."""
