"""How the face was taught (`scripts/train_face`): its data is made from the pocket voice and nothing else.

corpus    sentences to say
narrator  sentences -> sound, and when every phoneme is spoken
mouth     phonemes -> what a mouth does (coarticulation)
listening what a person says -> moments that a listener answers
scenes    two people talk: turns, nods, looks, blinks, moods -> motion and the sound of both
lessons   scenes -> batches in the shape of the model's windows
teach     flow matching, distillation, refiner; resumable
"""
