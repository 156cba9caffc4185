"""Texts of the checks on rewards, prompts and numbers (A4, A5, A6)."""

from __future__ import annotations

REST: dict[str, dict[str, str]] = {
    "A401": {
        "what": "A sample whose environment, tool or engine failed carries reward 0 like an honest failure, and its tokens are "
        "under the loss.",
        "why": "The policy is pushed away from whatever it did when the machine broke. The reward drops, training goes on, and the "
        "drop looks like a bad learning rate.",
        "example": "8 rollouts, rewards 1 1 1 1 0 0 0 0. Two of the zeros are time-outs: their advantage is -0.94 (GRPO) although "
        "nobody knows how they would have ended. Left out, the group is 1 1 1 1 0 0 and the honest failures get -1.29.",
        "by_hand": "Search messages and errors for 'Traceback', 'Error executing tool', 'timed out', and look at their rewards and "
        "masks.",
        "mend": "Give the episode an outcome of its own and no reward. TRL: return None from the reward function. verl: mask the "
        "response and drop the sample from its uid before the advantage. verifiers: score only traces without errors. Assay does "
        "it: outcome `environment error`, reward NaN.",
        "reported": "NeMo-RL #2207, NeMo-Gym #1351, agent-lightning #448; verl turns a tool's exception into text with reward 0.",
    },
    "A402": {
        "what": "Episodes that ended at a token or context limit count as failures, and nothing says that they were cut.",
        "why": "The limit is ours, not the task's. Long answers are punished for being long, the policy learns to be short, and the "
        "curve of length falls without anybody having asked for it.",
        "example": "Limit 512 tokens, 3 of 8 rollouts stop with 'length' and reward 0. A rollout that needed 530 tokens to succeed "
        "teaches the opposite of what is true.",
        "by_hand": "Count stop reasons by reward: if every 'length' has reward 0, the limit is the reward.",
        "mend": "Record the cut and choose: keep it as failure knowingly, leave it out (DAPO's overlong filter; TRL "
        "`mask_truncated_completions`), bootstrap its value (PPO), or raise the limit. Assay: outcome `cut`, key `cut`.",
        "reported": "The overlong filtering of DAPO (arXiv 2503.14476) is about this.",
    },
    "A403": {
        "what": "All episodes have one and the same reward.",
        "why": "With a group baseline every advantage is 0: the run costs money and changes nothing, or only the KL term moves.",
        "example": "A parser that expects '<answer>' where the model writes 'Answer:' gives 0 to all, for days.",
        "by_hand": "Print the set of rewards. Then score the gold answer: it must get the full reward.",
        "mend": "Run an oracle, a random policy and the first model over the same tasks before training, and compare the three.",
        "reported": "trl #3452, open-r1 #255, #436, #474, ms-swift #4789.",
    },
    "A404": {
        "what": "Groups whose rollouts all have one reward give no signal with a group baseline.",
        "why": "They are paid for and, in a token mean, still sit in the denominator and shrink the step of the others.",
        "example": "16 tasks, 12 of them all-fail: a quarter of the generated tokens teaches, and the loss is divided by all.",
        "by_hand": "Per group, largest minus smallest reward; the share of zeros is the share of dead groups.",
        "mend": "Easier tasks or a warm start, larger groups, or dynamic sampling (DAPO; `slots.keep = mixed` here) with its cost "
        "counted.",
        "reported": "trl #3857, #6365, ms-swift #4570.",
    },
    "A405": {
        "what": "Rewards outside the range that was declared.",
        "why": "One reward of 100 among ones sets mean and deviation of its group alone.",
        "example": "Range 0 to 1, rewards 0 1 0 37: a missing division by the number of tests.",
        "by_hand": "Smallest and largest reward, per reward function.",
        "mend": "Mend the reward function; clip only knowingly.",
    },
    "A406": {
        "what": "Samples without a reward have an advantage and are trained on.",
        "why": "Not known is not 0. A missing score that became 0, or a NaN that was filled, is a failure that nobody saw.",
        "example": "Rewards 1, none, 1, 0 filled to 1 0 1 0: the second rollout is pushed down for a verifier that did not answer.",
        "by_hand": "Count samples whose reward is missing and whose advantage is not 0.",
        "mend": "Leave them out of the group's statistics and of the loss. TRL: None means not applicable. Assay: NaN stays NaN.",
        "reported": "trl #5773, #5775.",
    },
    "A407": {
        "what": "Successes are rewarded less than failures of the same group.",
        "why": "The policy then learns to fail. A sign, a swapped column, or a penalty larger than the prize does it.",
        "example": "Success 1 - 0.05 x 30 turns = -0.5, giving up at once 0: giving up wins.",
        "by_hand": "Mean reward by outcome, within each group.",
        "mend": "Check the sign, then the size of penalties against the prize.",
    },
    "A501": {
        "what": "The gold answer, or a hint that was declared, stands in the prompt.",
        "why": "Success then measures copying. In evaluation it makes the whole table worthless.",
        "example": "A few-shot example that was drawn from the same set as the question, or a protocol prompt left on for "
        "evaluation.",
        "by_hand": "Search each prompt for its own gold string; short ones (a digit, 'yes') will match by chance, so look at them.",
        "mend": "Build evaluation prompts by one function without the hints, and keep this check in CI.",
    },
    "A502": {
        "what": "The same task is in training and in evaluation.",
        "why": "Held-out success is not held out. Splitting by seed is not enough: two thirds of fresh seeds of a small grid world "
        "repeat a layout that was seen.",
        "example": "Task 'go to the red ball', layout hash 3f2a, in train and in iid.",
        "by_hand": "Hash the content of each task, not its number, and intersect the sets.",
        "mend": "Split by the hash of the content. Assay's splits are.",
    },
    "A503": {
        "what": "The context of a turn does not begin with the ids of the turn before: something rewrote the history.",
        "why": "Each rewrite is a fork: the same episode must be trained as several samples, each with its whole prefix. The "
        "importance ratio of tokens whose context has changed is of another distribution.",
        "example": "A template that strips thinking from earlier turns: 8 rollouts became 64 samples and 1.8 million tokens.",
        "by_hand": "For turn t and t + 1 of a rollout: do the ids of t + 1 start with prompt and answer of t?",
        "mend": "A template with the prefix property, or splice the ids yourself. TRL, verl: keep the sampled ids of earlier turns "
        "instead of rendering messages again. Assay splices, always.",
        "reported": "slime #2288, verl #6854, prime-rl #1334, ART #726, tinker-cookbook #142.",
    },
    "A504": {
        "what": "Two start tokens at the head of a sample.",
        "why": "Template and tokenizer both added one. The model was never trained on that; log-probs shift a little everywhere.",
        "example": "ids 1 1 733 ...: the template wrote <s>, and encoding the text added it again.",
        "by_hand": "Print the first five ids.",
        "mend": "Encode rendered templates with add_special_tokens=False.",
    },
    "A601": {
        "what": "NaN or infinity in log-probs, advantages, weights or rewards that enter the loss.",
        "why": "One of them makes the whole step's gradient NaN; with a skip of such steps, training silently stands still.",
        "example": "A group of one with a deviation of 0 and no floor: 0 / 0.",
        "by_hand": "np.isfinite over each column where the mask is set.",
        "mend": "Find the row that is named; mend its cause (empty group, log of 0, an appended token without a log-prob).",
        "reported": "Agent-R1 #30, NeMo-RL #4161.",
    },
    "A602": {
        "what": "Ids that the vocabulary does not have.",
        "why": "An index error at best; at worst a padded embedding row that trains on noise.",
        "example": "Vocabulary 32,000 and id 32,001: an added special token that the model was not resized for.",
        "by_hand": "Smallest and largest id against the size of the embedding.",
        "mend": "Resize the embedding, or use the tokenizer that belongs to the model. -100 belongs into labels, not into ids.",
    },
    "A603": {
        "what": "The weight of a token depends on how far its batch was padded.",
        "why": "The same episode teaches more or less by who it shares a batch with, and the step size drifts with the longest "
        "answer.",
        "example": "Two samples of 10 tokens, one in a batch of width 64 and one of width 512: weights 1/64 and 1/512.",
        "by_hand": "For samples with equal counts of trained tokens, compare the summed weight across batches of unlike width.",
        "mend": "Divide by a constant or by the count of trained tokens. verl: set a loss scale factor with "
        "seq-mean-token-sum-norm, whose default is the padded width.",
        "reported": "verl, mode seq-mean-token-sum-norm without a configured constant.",
    },
    "A604": {
        "what": "The token weights are not those of the denominator that was declared.",
        "why": "Token mean, sequence mean and a constant are three different algorithms; micro-batching turns one into another.",
        "example": "Token mean per micro-batch, then averaged: a token in a short micro-batch weighs more. Losses 1 1 1 1 and 4 give "
        "1.6 over all tokens, 2.5 as the mean of means.",
        "by_hand": "Sum the weights per sample: equal for a sequence mean, proportional to its tokens for a token mean.",
        "mend": "Count tokens over the whole optimiser step before dividing.",
        "reported": "verl #1136, verl PR #559, trl #6365.",
    },
    "A605": {
        "what": "A few episodes carry several times their share of the gradient.",
        "why": "With a token mean, or with one row per turn, long episodes weigh more. It is a choice, and better a known one.",
        "example": "20 turns of 30 tokens against 2 turns: ten times the weight.",
        "by_hand": "Sum of |advantage x weight| per episode over the sum of all.",
        "mend": "Nothing, if meant; else a denominator per episode.",
        "reported": "agent-lightning #445, SkyRL #1529, #1278, verifiers #536.",
    },
}
