"""The pocket face's decoder: it draws. Motion in, pixels out; no weights.

A larger family decodes latents with a network (a VAE) in the same stage; the pocket face decodes 24 numbers by drawing
a portrait, because two CPU cores have time for it and one likes to look at it.

    character   how somebody looks: colours, proportions, hair, from a TOML file
    pose        head space -> picture: turning, tilting, leaning
    pen         smooth paths, soft shadows
    portrait    the drawing, part by part
"""
