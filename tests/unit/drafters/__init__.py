"""Drafters, trees and acceptance."""
