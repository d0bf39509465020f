"""The face: an LPM in miniature (LPM 1.0; seed 000). Sound of two people in, a moving portrait out, 25 fps.

    voice ring --+                                     noisy history            clean history
    person ring -+--> generate (2 steps of noise) --> draft --> refine (1 step) --> motion --> decode (drawing) --> I420
    mood --------+

Generator and refiner are the same network class at every size (`net.py`); the pocket face has 1.9 million parameters in
each, made by `scripts/train_face` from nothing but the pocket voice. What a frame does is 24 numbers (`motion.py`).
"""
