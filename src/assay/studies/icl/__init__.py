"""Our reading of "Agentic In-Context Learning": which interactive learner does a policy with fixed weights execute?"""
